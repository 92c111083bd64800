"""Text to train on and to evaluate with: pairs of segments in two languages, grouped in documents."""

from nomax.data.text.batches import Example, TokenOrder, documents, sentences
from nomax.data.text.corpus import Corpus, Document, Pair
from nomax.data.text.load import load
from nomax.data.text.tokenizer import Tokenizer

__all__ = ["Corpus", "Document", "Example", "Pair", "TokenOrder", "Tokenizer", "documents", "load", "sentences"]
