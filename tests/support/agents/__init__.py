"""Agents, parts of agents, and fakes of the controllers, ranks and sensors that agents communicate with."""
