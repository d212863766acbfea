"""MindSpore's own pages write `ms.parallel.rank_list_for_transform` and so on, too: all names are here again."""

from reshard.mindspore import *  # noqa: F403 -- see above
