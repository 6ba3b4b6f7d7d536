"""What prefix caching for Hugging Face transformers is made of."""
