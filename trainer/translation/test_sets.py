"""Finds the test sets of WMT and others by sacrebleu's names, in sacrebleu's cache."""

import os

from sacrebleu.dataset import DATASETS
from sacrebleu.dataset.wmt_xml import WMTXMLDataset

from configs.errors import UserError, did_you_mean
from data.sources.text_files import read_lines
from trainer.translation.metrics import check_texts


def read_test_set(name: str, languages: str) -> tuple[list[str], list[list[str]]]:
    """Returns sources and references of sacrebleu's test set, such as wmt14/full and en-de.

    Reads sacrebleu's cache and never downloads.
    """
    if name not in DATASETS:
        raise UserError(
            f"test set {name}: unknown to sacrebleu.{did_you_mean(name, DATASETS)}  "
            "See: sacrebleu --list."
        )
    dataset = DATASETS[name]
    if languages not in dataset.langpairs:
        raise UserError(
            f"test set {name}, languages {languages}: no such pair."
            f"{did_you_mean(languages, dataset.langpairs)}  "
            f"Legal: {', '.join(sorted(dataset.langpairs))}."
        )
    # The fields of an XML set would be read out of its archive, which is downloaded if need be.
    if isinstance(dataset, WMTXMLDataset):
        fields = dataset._get_langpair_allowed_refs(languages)
    else:
        fields = [field for field in dataset.fieldnames(languages) if field.startswith("ref")]
    paths = [dataset._get_txt_file_path(languages, field) for field in ("src", *fields)]
    if not all(map(os.path.exists, paths)):
        raise UserError(
            f"test set {name}, languages {languages}: not in sacrebleu's cache at "
            f"{os.path.dirname(paths[0])}.  With a network connection, fetch it with: "
            f"sacrebleu -t {name} -l {languages} --echo src.  Or give files."
        )
    sources, *references = [list(read_lines(path)) for path in paths]
    check_texts(paths[0], sources, references)
    return sources, references
