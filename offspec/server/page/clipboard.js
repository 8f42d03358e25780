// Copy text, also over plain HTTP, where browsers have no clipboard API.

import { $, make } from "./dom.js";

const SHOWN = 1500; // milliseconds

// Copy a text, and show on the button that was pressed whether it worked.
export async function copy(text, button) {
  const label = button.textContent;
  const done = (await byClipboard(text)) || bySelection(text, button);
  button.textContent = done ? "Copied" : "Not copied";
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
  const done = document.execCommand("copy");
  area.remove();
  button.focus();
  return done;
}
