"""Training with the authors' settings, on text and on images."""
