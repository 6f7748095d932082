"""cudatma inside other libraries. Each module imports the library it is named after."""
