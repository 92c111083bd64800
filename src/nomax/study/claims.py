"""The claims of the two papers that the studies judge, and a question of ours, in our words."""

from dataclasses import dataclass

PAPER = "Wortsman et al. 2023"
TEXT_PAPER = "Shen et al. 2023"


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
        Claim("S-softmax-ffn", "A softmax memory is worse than a ReLU feed-forward layer.", f"{TEXT_PAPER}, Sec. 3"),
        Claim("S-ln", "With LayerNorm on its output a softmax memory is as good as ReLU.", f"{TEXT_PAPER}, Sec. 3"),
        Claim(
            "S-slots",
            "With many slots ReLU is ahead of softmax, with or without LayerNorm.",
            f"{TEXT_PAPER}, Sec. 3",
        ),
        Claim(
            "S-central",
            "A softmax memory centralises: the largest 0.2 % of its weights hold most of their sum.",
            f"{TEXT_PAPER}, Sec. 3",
        ),
        Claim(
            "S-variance",
            "The output of a softmax memory has a small variance beside the residual's, that of ReLU has not.",
            f"{TEXT_PAPER}, Sec. 3",
        ),
        Claim("S-diverge", "ReLU put into attention directly does not converge.", f"{TEXT_PAPER}, Sec. 4"),
        Claim(
            "S-factor",
            "With the variance factor alone ReLU attention converges, but trails softmax.",
            f"{TEXT_PAPER}, Sec. 4",
        ),
        Claim(
            "S-losses",
            "With the two losses it matches or beats softmax, and without the normalisation loss it falls back.",
            f"{TEXT_PAPER}, Sec. 4",
        ),
        Claim(
            "S-speed",
            "ReLUFormer is as fast as softmax, and about 1.7 times as fast as sparsemax and 1.5-entmax.",
            f"{TEXT_PAPER}, Sec. 4",
        ),
        Claim(
            "S-long",
            "The advantage of ReLUFormer grows with the length of documents: on par to 256 tokens, ahead from 512.",
            f"{TEXT_PAPER}, Sec. 5",
        ),
        Claim(
            "S-distant",
            "ReLU attention keeps distant words, and spends less on commas and stop words.",
            f"{TEXT_PAPER}, Sec. 5",
        ),
        Claim(
            "Q-text",
            "The vision paper's L^-1 carries over to text: the best α is close to 1.",
            "a question of ours, which neither paper answers",
        ),
    )
}
