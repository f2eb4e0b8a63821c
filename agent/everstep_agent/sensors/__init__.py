"""What a node can see of itself. Every sensor yields results and never raises; silence is a result too."""
