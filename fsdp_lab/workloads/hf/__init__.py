"""Models of Hugging Face's transformers: no other package imports it, and here it is imported when it is needed."""
