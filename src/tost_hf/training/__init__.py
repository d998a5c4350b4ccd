"""Training of language and vision models with the authors' settings."""
