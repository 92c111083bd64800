# alias until the importers have moved: nomax.models.fields -> nomax.models.validation
from nomax.models.validation import check_fields

__all__ = ["check_fields"]
