"""The translation Transformer of the GPipe paper in small: its model, real text, training and beam search."""
