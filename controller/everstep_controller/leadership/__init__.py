"""Leader election among several controllers, and handover between them."""
