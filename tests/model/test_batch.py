"""A packed batch: targets and masks stay inside their documents."""

import pytest
import torch

from yunque.model.batch import NO_TARGET, PackedBatch


def test_documents_lie_end_to_end_with_targets_inside():
    batch = PackedBatch.from_documents([[7, 8, 9], [5], [1, 2]])
    assert batch.tokens_T.tolist() == [7, 8, 9, 5, 1, 2]
    assert batch.targets_T.tolist() == [8, 9, NO_TARGET, NO_TARGET, 2, NO_TARGET]
    assert batch.loss_mask_T.tolist() == [1, 1, 0, 0, 1, 0]
    assert batch.document_start_T.tolist() == [0, 0, 0, 3, 4, 4]
    assert batch.positions_T.tolist() == [0, 1, 2, 0, 0, 1]
    assert batch.num_tokens == 6
    types = [t.dtype for t in (batch.tokens_T, batch.targets_T, batch.loss_mask_T, batch.document_start_T)]
    assert types == [torch.int64, torch.int64, torch.float32, torch.int64]


def test_the_weight_of_a_token_lands_on_the_row_that_predicts_it():
    batch = PackedBatch.from_documents([[7, 8, 9], [1, 2]], [[1.0, 0.0, 0.5], [0.25, 1.0]])
    assert batch.loss_mask_T.tolist() == [0.0, 0.5, 0.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("documents", "masks", "message"),
    [
        ([[1], []], None, "document 1 has 0 tokens"),
        ([[1, 2]], [[1.0]], "document 0 has 2 tokens and a mask of 1"),
    ],
)
def test_empty_documents_and_masks_of_another_length_are_refused(documents, masks, message):
    with pytest.raises(ValueError, match=message):
        PackedBatch.from_documents(documents, masks)


def test_columns_have_a_row_per_token():
    batch = PackedBatch.from_documents([[1, 2, 3]])
    with pytest.raises(ValueError, match=r"columns\['x'\] has \(2, 4\) rows for 3 tokens"):
        PackedBatch(batch.tokens_T, batch.targets_T, batch.loss_mask_T, batch.document_start_T, {"x": torch.ones(2, 4)})
    with pytest.raises(ValueError, match="loss_mask_T"):
        PackedBatch(batch.tokens_T, batch.targets_T, torch.ones(2), batch.document_start_T)
    kept = PackedBatch(batch.tokens_T, batch.targets_T, batch.loss_mask_T, batch.document_start_T, {"x": torch.ones(3)})
    assert torch.equal(kept.to("cpu").columns["x"], torch.ones(3))
