"""Class-incremental learning for imbalanced medical images."""
