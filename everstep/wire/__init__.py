"""Messages between agent, controller and trainer."""
