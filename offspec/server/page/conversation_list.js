// Dialog with the stored conversations, which opens, deletes and creates conversations.

import { empty, list, remove, title } from "./conversations.js";
import { $, button, make } from "./dom.js";

const dialog = $("conversations");

export class ConversationList {
  constructor(chat) {
    this.chat = chat;
    $("conversations-button").addEventListener("click", () => {
      this.draw();
      dialog.showModal();
    });
    $("conversations-close").addEventListener("click", () => dialog.close());
    for (const id of ["new-button", "conversations-new"]) {
      $(id).addEventListener("click", () => {
        this.open(empty());
        $("question").focus();
      });
    }
  }

  open(conversation) {
    dialog.close();
    this.chat.open(conversation);
  }

  draw() {
    const conversations = list();
    $("conversation-list").replaceChildren(...conversations.map((each) => this.item(each)));
    $("conversations-none").hidden = conversations.length > 0;
  }

  item(conversation) {
    const isOpen = conversation.id === this.chat.conversation.id;
    const name = title(conversation);
    const time = new Date(conversation.time).toLocaleString([], { dateStyle: "medium", timeStyle: "short" });
    const below = isOpen ? `${time}, open` : time;
    const open = button(name, "open", `${name}, ${below}`);
    open.replaceChildren(make("span", [name]), make("small", [below]));
    open.addEventListener("click", () => (isOpen ? dialog.close() : this.open(conversation)));
    const item = make("li", [open, this.deleteButton(conversation, isOpen)]);
    if (isOpen) open.ariaCurrent = "true";
    return item;
  }

  // Return a button whose second press deletes the conversation.
  deleteButton(conversation, isOpen) {
    const element = button("Delete", "delete");
    const label = (text) => {
      element.textContent = text;
      element.ariaLabel = `${text} “${title(conversation).slice(0, 60)}”`;
    };
    label("Delete");
    element.addEventListener("blur", () => label("Delete"));
    element.addEventListener("click", async () => {
      if (element.textContent === "Delete") return label("Really delete?");
      if (isOpen) await this.chat.open(empty());
      remove(conversation.id);
      this.draw();
      $("conversations-new").focus();
    });
    return element;
  }
}
