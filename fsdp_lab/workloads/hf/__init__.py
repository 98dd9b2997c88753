"""Models of Hugging Face's transformers. No other package imports it; here it is imported on first use."""
