"""Parse, check, bind, differentiate and interpret statements."""
