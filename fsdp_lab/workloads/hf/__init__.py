"""Models of Hugging Face's transformers. Only this package imports it, on first use."""
