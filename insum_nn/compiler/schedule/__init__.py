"""What a Triton kernel computes (`form.py`), and the rules by which its loops are placed and its schedule is chosen."""
