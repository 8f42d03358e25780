// Helpers that find elements by id and create elements.

export const $ = (id) => document.getElementById(id);

export function make(name, children = [], className = "") {
  const element = document.createElement(name);
  element.append(...children);
  if (className) element.className = className;
  return element;
}

// Create a button. action: name for the listener of its container. name: label for screen readers.
export function button(label, action, name = label) {
  const element = make("button", [label]);
  element.type = "button";
  element.dataset.action = action;
  element.ariaLabel = name;
  return element;
}
