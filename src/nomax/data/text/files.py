# alias until the importers have moved: text.files.{jsonl,text_files} -> text.corpus.{read_jsonl,read_text_files}
from nomax.data.text.corpus import read_jsonl as jsonl
from nomax.data.text.corpus import read_text_files as text_files

__all__ = ["jsonl", "text_files"]
