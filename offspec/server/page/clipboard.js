// Copying of text, which also works over plain HTTP, where browsers have no clipboard API.

import { $, make } from "./dom.js";

const SHOWN = 1500; // milliseconds

// Copy a text, and show the outcome on the pressed button.
export async function copy(text, button) {
  const label = button.textContent;
  const copied = (await byClipboard(text)) || bySelection(text, button);
  button.textContent = copied ? "Copied" : "Not copied";
  $("announcement").textContent = button.textContent;
  setTimeout(() => {
    button.textContent = label;
    $("announcement").textContent = "";
  }, SHOWN);
}

async function byClipboard(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return false;
  }
}

function bySelection(text, button) {
  const area = make("textarea", [], "unseen");
  area.value = text;
  document.body.append(area);
  area.select();
  const copied = document.execCommand("copy");
  area.remove();
  button.focus();
  return copied;
}
