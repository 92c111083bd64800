"""The named data sets of text, as data: what each holds, where it comes from, and the checksums it must have."""

from nomax.data.registry import Package, TextEntry

_DEBIAN_PAGES = (
    Package(
        "apt",
        "manpages",
        "6.03-2",
        "manpages_6.03-2_all.deb",
        1_331_652,
        "efa1ba4cd19ad7baeae959c9209a7eb74be2ebb858bcabb412597bfc9f588c91",
    ),
    Package(
        "apt",
        "manpages-dev",
        "6.03-2",
        "manpages-dev_6.03-2_all.deb",
        2_030_264,
        "96f55cb5e26231d5567c89b692bced63825a14a2d5bd18fdf16ea2ed44eb9838",
    ),
)

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
    TextEntry(
        "manpages-de",
        "manual pages of Linux, paragraph by paragraph; a document is a page",
        ("en", "de"),
        counts={"train": 11_205, "valid": 389, "test": 516},
        documents={"train": 440, "valid": 22, "test": 29},
        licence="GPL and others",
        reader="nomax.data.text.manpages",
        packages=(
            *_DEBIAN_PAGES,
            Package(
                "apt",
                "manpages-de",
                "4.18.1-1",
                "manpages-de_4.18.1-1_all.deb",
                3_615_560,
                "37d2e7ee51f22952aecec3af93647ff59194a3c74bb7a694560f49c7f7ab3978",
            ),
            Package(
                "apt",
                "manpages-de-dev",
                "4.18.1-1",
                "manpages-de-dev_4.18.1-1_all.deb",
                1_141_048,
                "cb3d7c10977dd3c811065d89e0d912196ec5e6f2551308edb0ba72e02da838d7",
            ),
        ),
        prepared=3_719_288,
        arrays={
            "train.jsonl": "b7e73fb8e8804a1aaffb90229ca219a2ff3c9bad405b24cf35b91dc2a6faf5eb",
            "valid.jsonl": "d88a7f6c76789d5e8e052b662979c7c0a36a0d67057b0cad7af0d15fdf2277d4",
            "test.jsonl": "ef24674b2cc71676f66859b4892e4e36889044752636c5507b0134565c4250cb",
        },
    ),
    TextEntry(
        "manpages-fr",
        "manual pages of Linux, paragraph by paragraph; a document is a page",
        ("en", "fr"),
        counts={"train": 20_699, "valid": 947, "test": 1_244},
        documents={"train": 797, "valid": 44, "test": 47},
        licence="GPL and others",
        reader="nomax.data.text.manpages",
        packages=(
            *_DEBIAN_PAGES,
            Package(
                "apt",
                "manpages-fr",
                "4.18.1-1",
                "manpages-fr_4.18.1-1_all.deb",
                1_899_104,
                "ec29759cc0e4a44dc7719c1e32869d0060667049e584f09556f0d982b969ea33",
            ),
            Package(
                "apt",
                "manpages-fr-dev",
                "4.18.1-1",
                "manpages-fr-dev_4.18.1-1_all.deb",
                2_645_176,
                "25f5a53208d92f0a69a89e349edfb3068e6e6e4e0673fe712dd0d3b0c5b1512d",
            ),
        ),
        prepared=7_015_264,
        arrays={
            "train.jsonl": "e6ac89338b616bda6f3c4c52591aad26149a100d53cc7520310cb4499d43b28d",
            "valid.jsonl": "0ee5f11ae1e7e69049b417588c4e90ca7441c54416d436b6b8b1a9819fd58a20",
            "test.jsonl": "96cc8db2a13ea7068bd6b9115abaad18eb1861ec2be5d3d508477a40120dc721",
        },
    ),
    TextEntry(
        "descriptions-de",
        "what Debian says about its packages, paragraph by paragraph; a document is a package",
        ("en", "de"),
        counts={"train": 32_375, "valid": 1_830, "test": 1_556},
        documents={"train": 11_727, "valid": 634, "test": 530},
        licence="by package",
        reader="nomax.data.text.descriptions",
        packages=(
            Package(
                "apt-index",
                "en,de",
                "bookworm",
                "debian-descriptions-en-de.tar",
                17_285_120,
                "bf32a5a6833a519481d0aeb50c78e51624910106e592a37b41ed798a860bbe9e",
                changes=True,
            ),
        ),
        prepared=9_051_604,
        arrays={
            "train.jsonl": "d7c8bd71fc5e95ddf4b372a277c43958ff614f17620466caaa24c4e27a5b7f6e",
            "valid.jsonl": "f8f58a029ea19c979ff910fdfb348c5dce7ad41ef7e1d31a8be55b51f8eb31c3",
            "test.jsonl": "764ad2ef21fc4f84ce0f12c11bee48c0c72f078b20f9222f3076b85369a403a6",
        },
        made_with="index a35b7dabbfd8e594",
    ),
    TextEntry(
        "descriptions-fr",
        "what Debian says about its packages, paragraph by paragraph; a document is a package",
        ("en", "fr"),
        counts={"train": 50_976, "valid": 2_496, "test": 2_872},
        documents={"train": 17_263, "valid": 830, "test": 740},
        licence="by package",
        reader="nomax.data.text.descriptions",
        packages=(
            Package(
                "apt-index",
                "en,fr",
                "bookworm",
                "debian-descriptions-en-fr.tar",
                18_268_160,
                "6f9fb0aa67317fbd43b8bfe0981de5bbce0d0fa0a25c977bd89f7dfe2809b230",
                changes=True,
            ),
        ),
        prepared=14_462_381,
        arrays={
            "train.jsonl": "7cee4540d1f9000a6c5157220b61f39c325da0efe2ad34ff517d115d1131f2ef",
            "valid.jsonl": "413cd31a784ed596c9d990b3c6f8d0b264b10e7ab1f237b1edc811126a164f3f",
            "test.jsonl": "67be1a072c8c70219ee4de56086d19f67459b3aab2a7920a2edf15f07d58668d",
        },
        made_with="index f3a45115fc16ae3c",
    ),
)

TEXTS: dict[str, TextEntry] = {entry.name: entry for entry in _ALL_TEXTS}
