"""The controller of a chat: what both user interfaces share, without a widget or a tensor."""
