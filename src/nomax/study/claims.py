"""The claims of the vision paper that the studies judge, in our words. The ids stand in every verdict."""

from dataclasses import dataclass

PAPER = "Wortsman et al. 2023"


@dataclass(frozen=True)
class Claim:
    """A sentence that a study can reproduce or contradict, and where it comes from."""

    id: str
    sentence: str
    source: str


CLAIMS: dict[str, Claim] = {
    claim.id: claim
    for claim in (
        Claim(
            "W-match",
            "relu/L approaches or matches softmax in how accuracy scales with compute.",
            f"{PAPER}, abstract and Fig. 1",
        ),
        Claim("W-transfer", "The same holds for 10-shot transfer.", f"{PAPER}, Fig. 1 right"),
        Claim("W-alpha", "The best α is close to 1, for every h and every length.", f"{PAPER}, Fig. 2"),
        Claim("W-h", "No h clearly wins at α ≈ 1.", f"{PAPER}, Fig. 2"),
        Claim(
            "W-degrade",
            "Without length scaling accuracy degrades, more so for longer sequences.",
            f"{PAPER}, abstract and Fig. 2",
        ),
        Claim("W-identity", "Removing the nonlinearity costs accuracy.", f"{PAPER}, Sec. 3"),
        Claim("W-init", "At initialisation the mean weight is O(1/L) for α = 1.", f"{PAPER}, Sec. 3"),
        Claim("W-qknorm", "qk-layernorm has no large effect at these sizes.", f"{PAPER}, Fig. 3"),
        Claim("W-gate", "A gate does not remove the need for length scaling.", f"{PAPER}, Fig. 4"),
        Claim("W-gatecost", "The gate costs about 9 % more core-hours (9.3 % for S/8 with relu).", f"{PAPER}, Sec. 4"),
    )
}
