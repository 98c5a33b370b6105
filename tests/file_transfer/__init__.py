"""Values that travel through files in a directory that all nodes share: an extension of a program's own.

A program chooses it with `ray.init(extensions=file_transfer.SETTING)`, the variable FILE_TRANSFER_DIRECTORY and
`tensor_transport="file"`. It is made of what docs/how-to/extensions.md offers to any program; hpcray does not know it.
"""

SETTING = "file=file_transfer.extension:FileTransfer"
"""For the setting `extensions`."""
