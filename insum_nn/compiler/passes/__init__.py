"""Rewrites: of the loop-nest IR, of statements (`cut_products`, `path_products`), and what `tile` is made of."""
