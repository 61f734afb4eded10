"""How v4-nano is made: corpus, tokenizer, training and export (`docs/v4-nano.md`)."""
