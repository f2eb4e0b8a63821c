"""Choose one leader among several controllers, and hand over between them."""
