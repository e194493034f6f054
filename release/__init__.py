"""What a release is made of: wheels, chart, manifests, bill of materials, checksums, provenance, signatures.

Belongs here: how each is made from a checkout, byte for byte the same each time, and how each is verified with the tools
that everybody has. Does not belong here: container images (``images``), which a release names by digest; what is shipped.
"""
