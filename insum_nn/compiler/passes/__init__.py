"""Rewrites: of the loop-nest IR, of statements (`cut_products`, `split_static_tables`), and what `tile` is made of."""
