"""The named data sets of text, as data: what each holds, where it comes from, and the checksums it must have."""

from nomax.data.registry import Package, TextEntry

_ALL_TEXTS = (
    TextEntry(
        "bible-en-es",
        "the Bible, verse by verse: World English Bible and Reina-Valera 1909; a document is a chapter",
        ("en", "es"),
        counts={"train": 28_534, "valid": 796, "test": 1_257},
        documents={"train": 1_074, "valid": 38, "test": 61},
        licence="public domain",
        reader="nomax.data.text.bible",
        packages=(
            Package(
                "apt",
                "sword-text-web",
                "426.0-1",
                "sword-text-web_426.0-1_all.deb",
                3_956_428,
                "930b23670b352f0829a306501de4bebb5e654a2df02cde2cbe86b802177868e1",
            ),
            Package(
                "apt",
                "sword-text-sparv",
                "2.60-1",
                "sword-text-sparv_2.60-1_all.deb",
                2_722_332,
                "5c87f9b2bc97457e8a872f5bae7ea7ce59cb3de1dcee73e4d4740451863694cf",
            ),
        ),
        prepared=8_070_783,
        arrays={
            "train.jsonl": "eb16487250692f5abf2968010b8ab2355880d3da631f0c3655c59b62b6829471",
            "valid.jsonl": "38ca57e1db1c361262dc3026adeef4ed479ea2b2dcab4de51bac14ffdd6731ae",
            "test.jsonl": "f965b71108987c552acfd53ad0a06965813b25b811cda3dc330d84752fe36a0f",
        },
        requires={"pysword": "pysword"},
    ),
)

TEXTS: dict[str, TextEntry] = {entry.name: entry for entry in _ALL_TEXTS}
