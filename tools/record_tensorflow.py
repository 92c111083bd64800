"""Record what big_vision's own preprocessing makes of a pattern: writes tests/golden/tensorflow.json.

    TF_ENABLE_ONEDNN_OPTS=0 python tools/record_tensorflow.py BIG_VISION_CHECKOUT

It needs big_vision's big_vision/pp/autoaugment.py and versions that go together: tensorflow-cpu 2.15.1,
tensorflow-addons 0.23.0, numpy 1.26. (numpy 2 refuses Solarize's threshold 256, which earlier ones wrap to 0.) oneDNN
is off, as it adds Sharpness's thirteenths in another order. What is written are digests of [224, 224, 3] bytes.
"""

import hashlib
import importlib.util
import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

TESTS = Path(__file__).parents[1] / "tests"
LEVELS = (0, 3, 5, 10, 15, 18, 20, 23, 30)
CENTRE = (200, 17)  # row and column around which Cutout cuts
SIGNED = ("Rotate", "ShearX", "ShearY", "TranslateX", "TranslateY")
SIZES = ((500, 375), (333, 500), (300, 300), (1000, 257), (60, 45), (512, 512), (1, 3), (224, 224))


def main() -> None:
    import tensorflow as tf

    sys.path.insert(0, str(TESTS))
    from pictures import pattern

    def image(width: int, height: int) -> Any:
        return tf.constant(np.array(pattern(width, height)))

    autoaugment = _module(Path(sys.argv[1], "big_vision", "pp", "autoaugment.py"))
    levels_to_arguments = autoaugment.level_to_arg(autoaugment.HParams(cutout_const=40, translate_const=100))
    operations = {}
    for level in LEVELS:
        for name, function in autoaugment.NAME_TO_FUNC.items():
            for sign in (1, -1) if name in SIGNED else (1,):
                centre = list(CENTRE)
                autoaugment.tf.random_uniform = lambda centre=centre, **_: centre.pop(0)
                autoaugment._randomly_negate_tensor = lambda value, sign=sign: tf.constant(sign * value, tf.float32)
                arguments = levels_to_arguments[name](float(level))
                if name in (*SIGNED, "Cutout"):
                    arguments = (*arguments, [128] * 3)
                operations[f"{name} {level} {sign}"] = _digest(function(image(224, 224), *arguments))

    resized = {}
    for width, height in SIZES:
        factor = tf.cast(256, tf.float32) / tf.cast(min(width, height), tf.float32)
        small = [int(tf.round(tf.cast(length, tf.float32) * factor)) for length in (height, width)]
        for name, size, method in (("small", small, "area"), ("square", [256, 256], "bilinear")):
            whole = tf.cast(tf.clip_by_value(tf.image.resize(image(width, height), size, method), 0, 255), tf.uint8)
            top, left = (size[0] - 224) // 2, (size[1] - 224) // 2
            resized[f"{name} {width} {height}"] = _digest(whole[top : top + 224, left : left + 224])

    found = {
        "made_with": {name: version(name) for name in ("tensorflow-cpu", "tensorflow-addons", "numpy")},
        "centre": CENTRE,
        "operations": operations,
        "resized": resized,
    }
    (TESTS / "golden" / "tensorflow.json").write_text(json.dumps(found, indent=1) + "\n")


def _module(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # where its data classes look for themselves
    spec.loader.exec_module(module)
    return module


def _digest(pixels: Any) -> str:
    return hashlib.sha256(pixels.numpy().tobytes()).hexdigest()[:16]


if __name__ == "__main__":
    main()
