"""A conversation at a desk: what every face of `offspec chat` shares, without a widget or a tensor."""
