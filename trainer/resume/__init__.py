"""What an interrupted run continues from: its state, its files, and how it is told to stop."""
