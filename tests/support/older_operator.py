"""``python -m older_operator``: an operator as it was before v1beta1, which watches and writes v1alpha1 alone.

It is the operator of this tree with the first version in place of the newest; what it decodes is the same.
"""

from __future__ import annotations

import sys

from xpyd_operator.api import base, words

assert words.OLDER_VERSION  # imported before the constants are changed: documents go on to be decoded to one version
base.VERSION, base.API_VERSION = base.FIRST_VERSION, base.FIRST_API_VERSION  # type: ignore[misc]

if __name__ == "__main__":
    from patient_operator import main

    sys.exit(main())
