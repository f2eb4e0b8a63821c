"""The steps of bench.gpu, each a program of its own, and what runs them within their time and reports on them."""
