"""What a run changes about a compiled model before it trains: learning rate, accumulation, frozen layers."""
