"""Run the core: take events in, store what it decides, push directives to agents."""
