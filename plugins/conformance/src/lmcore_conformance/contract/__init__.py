"""The plugin contract: its description from the code, snapshots of its versions, differences."""
