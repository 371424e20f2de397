"""verify(): a package against the model it was made from, by running both."""

from autopart.verification.check import verify
from autopart.verification.report import VerifyReport

__all__ = ["VerifyReport", "verify"]
