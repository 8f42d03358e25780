// Dialog with the system prompt and sampling settings. Its fields are named as in the API; empty ones are omitted.

import { $ } from "./dom.js";
import { readJson, write } from "./storage.js";

const KEY = "offspec-settings";
const form = $("settings-form");
const fields = [...form.elements].filter((field) => field.name);
let chosen = {}; // text of each field, by name

export const system = () => chosen.system ?? "";

export function sampling() {
  const numbers = fields.filter((field) => field.type === "number" && chosen[field.name]);
  return Object.fromEntries(numbers.map(({ name }) => [name, Number(chosen[name])]));
}

// Fill the fields with stored values, leaving invalid ones empty.
function fill(values) {
  for (const field of fields) {
    const value = values?.[field.name];
    field.value = typeof value === "string" ? value : "";
    if (!field.checkValidity()) field.value = "";
  }
}

function choose() {
  chosen = Object.fromEntries(fields.map(({ name, value }) => [name, value.trim()]));
  $("settings-button").classList.toggle("changed", Object.values(chosen).some(Boolean));
}

form.addEventListener("submit", () => {
  choose();
  write(KEY, JSON.stringify(chosen));
});
$("settings-button").addEventListener("click", () => {
  fill(chosen);
  $("settings").showModal();
});
$("settings-clear").addEventListener("click", () => fill({}));
$("settings-cancel").addEventListener("click", () => $("settings").close());
fill(readJson(KEY));
choose();
