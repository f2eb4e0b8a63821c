"""The contract that agent, controller and trainer hooks share: names, messages, errors, clocks."""

__version__ = "0.1.0"
