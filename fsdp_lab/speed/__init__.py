"""How long a step takes on a device that is not here: what it computes and sends, and what that costs. No torch."""
