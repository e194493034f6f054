"""How many instances of each role the load needs: from what routers observe to wanted counts, and a sentence that says why.

    figures ──▶ capacity (learned)  ─┐
            └─▶ forecast (demand)   ─┴─▶ need ──▶ decide ──▶ counts + sentence

Belongs here: arithmetic on figures; the memory is a value that goes in and comes out. Does not belong here: where figures
come from, who writes the counts, the limits of the document (``plan/counts``).
"""
