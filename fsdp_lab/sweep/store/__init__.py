"""What a sweep leaves in its folder, and how the next start takes it up."""
