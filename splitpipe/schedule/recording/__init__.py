"""What steps took, as they were recorded, and where their time went."""
