"""The controller of a chat: what every face of `offspec chat` shares, without a widget or a tensor."""
