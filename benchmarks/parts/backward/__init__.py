"""What the split backward costs and gains, by itself."""
