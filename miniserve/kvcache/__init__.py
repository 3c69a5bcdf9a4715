"""KV memory for layers that share it: the map, what it means in bytes, who holds which page, the memory itself.

Read in this order: `sharing` (which layer reads which), `layout` (groups, classes, bytes), `block_manager`
(ids, reference counts, prefix cache), `pool` (tensors). All but `pool` import nothing but the standard library.
"""
