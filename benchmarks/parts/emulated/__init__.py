"""The engine by itself, on devices that sleep."""
