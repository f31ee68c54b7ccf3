"""What every room uses: errors, files, progress, tables, limits."""
