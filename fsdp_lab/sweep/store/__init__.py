"""A sweep's folder: what a driver writes there, and how the next start resumes from it."""
